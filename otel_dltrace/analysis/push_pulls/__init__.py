"""What push_pulls tell by key and partition, as workers and servers saw them."""
