"""Tables of the places in other people's code where spans begin and end."""
