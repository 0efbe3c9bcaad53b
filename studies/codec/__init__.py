"""The codec study: 2-bit weight codes side by side, by error, by loss on the mini model and by decode rate.

`python -m studies.codec` from the checkout's root prints the table of README.md.
"""
