"""Wrong programs on purpose: how many of them do the tests find?"""
