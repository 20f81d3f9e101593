"""Records of what commit f6f8a49 computes, and what compares the current scripts with them."""
