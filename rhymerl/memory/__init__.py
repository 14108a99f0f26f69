"""What a rank holds on its device and sends to others, by arithmetic on shapes: no tensor is made, no device asked."""
