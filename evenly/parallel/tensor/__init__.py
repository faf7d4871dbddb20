"""The tensor axis: parameters split over ranks, and the model's own forward over what each rank holds of them."""
