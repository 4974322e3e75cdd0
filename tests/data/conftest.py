from hypothesis import settings

# No time limit for an example: on a loaded machine it fails tests that are right.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
