"""The load on the collectors: nothing is lost, and each step is whole on one gateway; no figure is tested."""

from benchmarks import bench_collector


def test_no_span_of_64_ranks_is_lost():
    """Through sidecar, router, two gateways and Jaeger, which is asked for every span."""
    seen = bench_collector.measure(rounds=1, steps=3, decision_wait="1s")

    found = (seen.spans, seen.traces, seen.lost, seen.doubled, seen.parted, sum(seen.through.values()))
    assert found == (3 * (64 * 120 + 1), 3, 0, 0, 0, 3)


def test_what_is_lost_or_doubled_or_parted_is_told():
    """By trace: two spans never came, one came twice, and two gateways had a part."""

    class HalfAJaeger:
        def get(self, _):
            spans = [{"spanID": name} for name in ("0a", "0b", "0b")]
            tags = [{"key": bench_collector.GATEWAY, "value": f"gateway-{i}"} for i in range(2)]
            return {"data": [{"spans": spans, "processes": {f"p{i}": {"tags": [tag]} for i, tag in enumerate(tags)}}]}

    seen = bench_collector.Seen()
    bench_collector._look_up(HalfAJaeger(), "1" * 32, {10, 11, 12, 13}, seen)

    assert (seen.traces, seen.lost, seen.doubled, seen.parted) == (1, 2, 1, 1)
