"""`penstock judge`: measures the rubric judges of a configuration before they decide rewards.

`attack.py` plants texts that try to fool judges in wrong work, `calibrate.py` compares judges with
people's labels, `audit.py` looks for cheats, and `agreement.py` has the statistics.
`calibration.py` checks the calibration files of a run's judges against the required minimum.
"""
