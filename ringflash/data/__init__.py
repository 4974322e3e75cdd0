"""From documents to batches: sources, tokenizers, packing, and the pipeline that resumes exactly.

Everything is reached by index, so the state of a run's data is one number, the same for any count
of hosts. Import from the modules: this package does nothing on import.
"""
