"""Services and files that metrics go to: JSON lines, TensorBoard, Weights & Biases, MLflow."""
