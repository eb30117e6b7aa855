"""Whether this host's ranks mean the same by "step n": the WORLD group's seq at its start says so (contract 4)."""

REMEMBERED = 4096
_TOLD = -1


class Drift:
    """What the local ranks of one world said of their steps, as far back as ranks may be apart."""

    def __init__(self) -> None:
        self._seqs: dict[int, int] = {}

    def is_news(self, step: int, seq: int) -> bool:
        """Take in that a rank began *step* at the group's *seq*; return whether that is the first to disagree.

        A seq of 0 is not known, and is compared with nothing.
        """
        if seq <= 0:
            return False
        known = self._seqs.setdefault(step, seq)
        if len(self._seqs) > REMEMBERED:
            del self._seqs[next(iter(self._seqs))]
        if known in (seq, _TOLD):
            return False
        self._seqs[step] = _TOLD
        return True
