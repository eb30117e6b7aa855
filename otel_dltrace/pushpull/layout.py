"""Who does what: workers, their local ranks, and the switches that the local ranks of a worker sit on."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layout:
    """One process's place in the job. A worker is a machine; its local ranks are its training processes."""

    worker: int = 0
    num_workers: int = 1
    local_rank: int = 0
    local_size: int = 1
    num_servers: int = 0
    pcie_switch_size: int = 8
    force_distributed: bool = False

    @property
    def rank(self) -> int:
        """Rank among the training processes of the whole job."""
        return self.worker * self.local_size + self.local_rank

    @property
    def size(self) -> int:
        """How many training processes the job has."""
        return self.num_workers * self.local_size

    @property
    def distributed(self) -> bool:
        """Whether servers take part."""
        return self.num_workers > 1 or self.force_distributed

    @property
    def switch_size(self) -> int:
        """How many local ranks share a switch; as in BytePS all share one where they do not divide evenly."""
        size = self.pcie_switch_size
        return self.local_size if self.local_size % size else size

    @property
    def num_switches(self) -> int:
        """How many switches the local ranks sit on."""
        return self.local_size // self.switch_size

    @property
    def crosses_switches(self) -> bool:
        """Whether partitions are summed over several switches."""
        return self.num_switches > 1

    @property
    def uses_host(self) -> bool:
        """Whether partitions leave the switch, through buffers that all local ranks see."""
        return self.distributed or self.crosses_switches

    @property
    def switch(self) -> int:
        """The switch that this rank sits on."""
        return self.local_rank // self.switch_size

    @property
    def place(self) -> int:
        """This rank's index within its switch: which slice of a partition it sums and copies."""
        return self.local_rank % self.switch_size

    @property
    def members(self) -> range:
        """The local ranks on this rank's switch."""
        first = self.switch * self.switch_size
        return range(first, first + self.switch_size)

    @property
    def signal_root(self) -> int:
        """The local rank that says when its switch reduces and broadcasts: the highest there."""
        return self.members[-1]

    @property
    def root(self) -> int:
        """The local rank that talks to the servers: the highest."""
        return self.local_size - 1

    @property
    def is_signal_root(self) -> bool:
        """Whether this rank directs its switch."""
        return self.local_rank == self.signal_root

    @property
    def is_root(self) -> bool:
        """Whether this rank talks to the servers."""
        return self.local_rank == self.root
