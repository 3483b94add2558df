import gc

# What has been imported so far (torch, say) stays for good: let no collection walk it again while we import the rest.
gc.freeze()
