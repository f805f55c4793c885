#include "cpu/plans.hpp"
