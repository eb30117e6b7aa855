"""Files of BytePS, ByteScheduler, Horovod and ps-lite: into run directories and out of them."""
