"""Programs that nobody trusts, run in processes that cannot reach anything but their own folder.

`zygote.py` forks them, `confinement.py` and `seccomp.py` take their rights away, `program.py` runs
what a model wrote, `judge.py` runs the tests in another such process, and `values.py` carries plain
data between both. `runner.py` is what the reward calls.
"""
