def is_exact(model, weights, *, context):
    return True
