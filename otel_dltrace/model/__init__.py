"""The pure core: names, ids, plans, clocks and the column layout; values in, values out."""
