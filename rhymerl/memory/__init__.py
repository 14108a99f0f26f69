"""What a rank of a run holds on its device and sends to others, as arithmetic on shapes: no tensor is made, no device is asked."""
