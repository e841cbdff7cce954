"""What becomes of the products of linears of few rows on Hopper, in Gluon."""
