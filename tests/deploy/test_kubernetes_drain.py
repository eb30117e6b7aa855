"""The drain as a sidecar: it serves trainers that start none, and hands over all it has before it ends."""

import json
import sys
import time

from tests.support.servers import collector, wait_until

STEPS = """
    import otel_dltrace as d
    d.start()
    for i in range(5):
        with d.step(i):
            with d.phase("rollout"):
                pass
"""


def test_a_sidecar_delivers_to_a_collector_that_comes_back_while_it_ends(place, tmp_path):
    """The collector's container restarts as the trainer ends: no span is left in the volume that dies with the pod."""
    with collector(tmp_path) as gone:
        gone.stop()
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": gone.http, "OTEL_DLTRACE_DIR": str(place.folder)}
        sidecar = place.popen([sys.executable, "-m", "otel_dltrace", "drain", "--stay", "--deliver=60"], **env)
        wait_until((place.rings / "all.bell").is_fifo, what="the drain's bell, for which the startup probe waits")
        assert place.run(STEPS, OTEL_DLTRACE_DRAIN="off", OTEL_DLTRACE_DIR=str(place.folder)).returncode == 0
        sidecar.terminate()
        time.sleep(2)  # longer than the drain of a training process would wait
        gone.start()

        assert place.finish(sidecar).returncode == 0
        (run,) = place.runs()
        (told,) = [json.loads(path.read_text())["summary"]["otlp"] for path in run.glob("hosts/*/drain.json")]
        assert (told["accepted"], told["spilled"], told["dropped"]) == (15, 0, {})
        assert len(gone.wait_for(15)) == 15


def test_the_doctor_tells_whether_somebody_drains_in_the_trainers_place(place):
    """Without the sidecar what is recorded stays in the rings."""
    env = {"OTEL_DLTRACE": "1", "OTEL_DLTRACE_DRAIN": "off"}
    alone = place.command("doctor", "--quick", "--json", **env)
    sidecar = place.popen([sys.executable, "-m", "otel_dltrace", "drain", "--stay"])
    wait_until((place.rings / "all.bell").is_fifo, what="the drain's bell")
    served = place.command("doctor", "--quick", "--json", **env)
    sidecar.kill()
    place.finish(sidecar)
    killed = place.command("doctor", "--quick", "--json", **env)

    seen = (alone, served, killed)
    told = [[it for it in json.loads(done.stdout)["findings"] if it["area"] == "fork"] for done in seen]
    assert [[it["verdict"] for it in found] for found in told] == [["problem"], ["fine"], ["problem"]]
    assert "drain --stay" in told[0][0]["cure"]
    assert told[1][0]["what"].endswith(f"a drain serves {place.rings}")
