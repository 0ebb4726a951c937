def names():
    return ()
