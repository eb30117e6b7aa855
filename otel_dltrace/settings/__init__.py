"""What the environment says: the configuration, the switch, who this process is, where the viewers are."""
