"""Operations on the products of a linear before they are stored."""
