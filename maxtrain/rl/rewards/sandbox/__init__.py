"""A sandbox for untrusted programs: processes that cannot reach anything but their own folder.

`zygote.py` forks them, `confinement.py` and `seccomp.py` drop their rights, `program.py` runs what
a model wrote, `judge.py` runs the tests in another such process, and `values.py` carries plain data
between both. The reward calls `runner.py`.
"""
