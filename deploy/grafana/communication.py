"""What communication takes: collectives, and the stages of push_pull."""

from panels import BUCKETS, CALLS, JOBS, OF_JOB, RANK, RANKS, ROWS, SPANS, Dashboard, Panel, mean, quantile, rate

CHOSEN = f'{OF_JOB},dl_comm_operation!="",dl_comm_operation=~"$operation"'
OPERATION = "{{dl_comm_operation}}"
PARTITIONS = f'{OF_JOB},dl_queue_type!=""'

COLLECTIVES = (
    Panel(
        "Latency of operations",
        "From enqueue to done. A dot is an operation: it leads to the trace of its step, where that was kept.",
        {f"{OPERATION} p{100 * q:g}": quantile(q, SPANS, CHOSEN, "dl_comm_operation") for q in (0.5, 0.99)},
    ),
    Panel(
        "Latencies",
        "How many operations took how long.",
        {"{{le}}": rate(SPANS + "_bucket", CHOSEN, "le")},
        show=BUCKETS,
    ),
    Panel(
        "Operations a second",
        "Of those that were sent: of every step the stages, of the steps in OTEL_DLTRACE_STEPS everything.",
        {OPERATION: rate(CALLS, CHOSEN, "dl_comm_operation")},
        "ops",
    ),
    Panel(
        "Latency by rank",
        "The mean. In a collective the last rank waits least, so it is the lowest line that is late.",
        {RANK: mean(SPANS, CHOSEN, RANKS)},
    ),
    Panel(
        "Errors a second",
        "Spans of any kind whose status is an error.",
        {"{{span_name}}": rate(CALLS, f'{OF_JOB},status_code="STATUS_CODE_ERROR"', "span_name")},
        "ops",
    ),
)
PUSH_PULL = (
    Panel(
        "Stages of partitions, p99",
        "push_pull and BytePS, by queue type.",
        {"{{dl_queue_type}}": quantile(0.99, SPANS, PARTITIONS, "dl_queue_type")},
    ),
    Panel(
        "Stages of partitions",
        "The mean time in each.",
        {"{{dl_queue_type}}": mean(SPANS, PARTITIONS, "dl_queue_type")},
        show=ROWS,
    ),
    Panel(
        "Requests as servers see them, p99",
        "A pull lasts until the last worker has pushed.",
        {"{{span_name}}": quantile(0.99, SPANS, f'{OF_JOB},dl_role="server",span_name=~"push|pull"', "span_name")},
    ),
    Panel(
        "Requests of workers to servers",
        "A second.",
        {
            "{{client}} {{client_dl_queue_type}} {{server}}": rate(
                "traces_service_graph_request_total",
                'client=~"($job)-worker"',
                "client, server, client_dl_queue_type",
            )
        },
        "ops",
    ),
)

COMMUNICATION = Dashboard(
    "communication",
    "Communication",
    {**JOBS, "operation": f"label_values({CALLS}{{{OF_JOB}}}, dl_comm_operation)"},
    {"Operations": COLLECTIVES, "push_pull": PUSH_PULL},
)
