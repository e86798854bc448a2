"""`penstock judge`: measures the rubric judges of a configuration before they decide rewards.

`attack.py` presents wrong work with texts that try to fool judges, `calibrate.py` compares judges
with people's labels, `audit.py` looks for cheats; `agreement.py` has the statistics.
`calibration.py` reads the file that keeps a result, and refuses a judge below what a run demands.
"""
