"""Networks beyond two layers: coordinate MLPs, ResNets, the recording trainer and data loaders."""
