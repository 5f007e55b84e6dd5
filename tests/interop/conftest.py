from classlens.models._torchvision import import_torchvision

# First, with our care for its compiled operations: pytorch_grad_cam and zennit import it without.
import_torchvision()
