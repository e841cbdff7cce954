"""Ends of linears of few rows on Hopper, in Gluon: their products become results."""
