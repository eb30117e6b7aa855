"""Chrome traces, one layout for two writers: `writer` draws batches, `exporter` anybody's SDK spans as they end."""
