"""What goes out, when and in which trace: windows, budgets, roots, and the way to each exporter."""
