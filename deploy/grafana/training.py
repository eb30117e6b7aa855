"""Steps, their stages, and who makes the others wait."""

from panels import JOBS, OF_JOB, RANK, RANKS, ROWS, SPANS, STACK, TRACES, Dashboard, Panel, mean, quantile, rate

STEP, EXPOSED = "dl_step_duration_seconds", "dl_step_grad_sync_exposed_seconds"
STAGE = "dl_step_stage_duration_seconds"
PHASES, PHASE = "service_name, dl_phase", "{{service_name}} {{dl_phase}}"
# The exposed time of some steps is not known: each mean is that of the steps which have it.
STEP_TIME, EXPOSED_TIME = mean(STEP, OF_JOB, RANKS), mean(EXPOSED, OF_JOB, RANKS)
OWN_TIME = f"{STEP_TIME} - {EXPOSED_TIME}"
KNOWN = " Empty where the exposed time is not known: DDP on NCCL without TORCH_NCCL_ENABLE_TIMING=1, the level `step`."
MEDIAN_RANK = f"quantile by (service_name) (0.5, {OWN_TIME})"


def _of_each_rank(metric: str) -> str:
    """Return *metric* once for each rank: of a job that was started again, both runs are shown for some minutes."""
    return f"max by ({RANKS}) ({metric}{{{OF_JOB}}})"


STEPS = (
    Panel(
        "Step time by rank",
        "The mean. In synchronous training all ranks take as long as the slowest.",
        {RANK: STEP_TIME},
    ),
    Panel(
        "Step time",
        "Quantiles over all ranks, from the spans. A dot is a step: it leads to its trace, where that was kept.",
        {f"p{100 * q:g}": quantile(q, SPANS, f'{OF_JOB},span_name="rank.step"') for q in (0.5, 0.95, 0.99)},
    ),
    Panel(
        "Samples a second",
        "All ranks together.",
        {"{{service_name}}": f"sum by (service_name) ({_of_each_rank('dl_throughput_samples_per_second')})"},
        "short",
    ),
    Panel(
        "Batches a second",
        "The mean of the ranks.",
        {"{{service_name}}": f"avg by (service_name) ({_of_each_rank('dl_throughput_batches_per_second')})"},
        "short",
    ),
)
STAGES = (
    Panel(
        "Stages",
        "The mean time of each stage, of the steps that had it. A stage that gets slow changes its colour.",
        {PHASE: mean(STAGE, OF_JOB, PHASES)},
        show=ROWS,
    ),
    Panel(
        "Where a step goes",
        "The mean of all steps, stacked: a stage that few steps have (`checkpoint`, `evaluate`) is thin."
        " `residual` is the part of the step that no stage covers.",
        {
            PHASE: f"{rate(STAGE + '_sum', OF_JOB, PHASES)} / on (service_name) group_left () "
            + rate(STEP + "_count", OF_JOB, "service_name")
        },
        show=STACK,
    ),
)
STRAGGLERS = (
    Panel(
        "Own time by rank",
        "A step without the time blocked by communication. The rank whose row stands out makes the others wait."
        + KNOWN,
        {RANK: OWN_TIME},
        show=ROWS,
    ),
    Panel(
        "Behind the median rank",
        f"How much longer than the median rank the five slowest work in a step.{KNOWN}",
        {RANK: f"topk(5, ({OWN_TIME}) - on (service_name) group_left () {MEDIAN_RANK})"},
    ),
    Panel(
        "Exposed communication by rank",
        "Share of the step in which the training thread is blocked by communication. A straggler has the least."
        + KNOWN,
        {RANK: f"({EXPOSED_TIME}) / ({STEP_TIME})"},
        "percentunit",
    ),
    Panel(
        "Waiting for data by rank",
        "The mean time in `dataloader_next`, of the steps that had it.",
        {RANK: mean(STAGE, f'{OF_JOB},dl_phase="dataloader_next"', RANKS)},
    ),
)
OF_THIS_JOB = 'resource.service.name =~ "$job"'
KEPT = (
    Panel(
        "Slow steps",
        "Steps above a second that Tempo has; each leads to its trace.",
        {"": f'{{ {OF_THIS_JOB} && span:name = "train.step" && span:duration > 1s }} | select(span.dl.step)'},
        show=TRACES,
    ),
    Panel(
        "What was cut off or failed",
        "Spans that were open when their process was killed, and operations that raised an error.",
        {
            "": f"{{ {OF_THIS_JOB} && (span.dl.span.truncated = true || span:status = error) }}"
            " | select(resource.dl.rank, span.dl.step)"
        },
        show=TRACES,
    ),
)

TRAINING = Dashboard(
    "training", "Training", JOBS, {"Steps": STEPS, "Stages": STAGES, "Stragglers": STRAGGLERS, "Traces": KEPT}
)
