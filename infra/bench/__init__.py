"""`penstock bench`: speed as ratios in one run. A file for each thing that is measured."""
