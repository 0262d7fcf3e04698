"""Video as a few slots: seen frame by frame, and judged by what can be told from them."""
