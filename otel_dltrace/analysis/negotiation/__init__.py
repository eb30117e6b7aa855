"""What Horovod's coordinator and MPI's ranks tell: negotiation, activities, what computation hides."""
