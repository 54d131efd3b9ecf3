"""Forecasts from a trace: a stack simulated in virtual time, and curves of what more memory brings; opens no tier.

service       how long a tier takes, calibrated by `kvtier bench --json` or by stated defaults
stack         a stack in virtual time, on a loop whose clock jumps, over tiers with a queue and a speed
variants      `--set`: a grid of changes to a stack file
simulate      a whole simulation: when requests come, and their first tokens
report        its result: variants side by side
miss_ratio    the exact curve of LRU from stack distances; other policies on metadata alone
advise        the advice: curve, prefill seconds saved, where money saves most
page          pages for a browser, and their charts
run_page      the page of a run: tiers over time, and the path of a request
"""
