"""Where ranks stood still, were cut off, or failed."""
