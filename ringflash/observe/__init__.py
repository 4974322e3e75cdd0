"""What a run tells while it runs: metrics writers, progress, tables, memory."""
