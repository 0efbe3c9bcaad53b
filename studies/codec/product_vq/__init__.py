"""The codebook of product VQ, how it was made, and the search for the nearest vector."""
