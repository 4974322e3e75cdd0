"""Launch files of a run, written from its configuration: `ringflash launch render`.

Arguments to `Options`, a topology to a `Shape`, both to files: a target is a function. Nothing is submitted
here, and nothing is asked of a cloud: the command that does it is printed.
"""
