"""`penstock judge`: how good the rubric judges of a configuration are, before they pay rewards.

`attack.py` asks them about wrong work dressed up by texts that fool judges (`attacks.py`),
`calibrate.py` about work that people labelled (`labels.py`), by the figures of `agreement.py`;
`calibration.py` is the file that keeps the result, and refuses a judge below what a run demands.
"""
