"""What a call is about: groups, checked calls, their signatures and Works."""
