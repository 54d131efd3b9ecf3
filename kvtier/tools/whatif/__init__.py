"""What-if answers from a trace: simulating a stack in virtual time, and curves that say what more memory brings.

virtual_time  events and coroutines without a clock
service       how long a tier takes, calibrated by `kvtier bench --json` or by stated defaults
device        one tier's queue and device in virtual time
stack         a stack in virtual time: the control plane over such tiers
variants      `--set`: a grid of changes to a stack file
engine_time   when requests come, and their first tokens
simulate      one whole simulation
report        its result: variants side by side
miss_ratio    the exact curve of LRU from stack distances
policy_replay a policy in a tier of a size, on metadata alone
savings       prefill seconds saved, and where money saves most
advise        the advice: curve, worth, purchases
charts        rows of series over one axis, drawn by plotly
page          pages for a browser
run_page      the page of a run: tiers over time, and the path of a request
"""
