#include "headrace/headrace.h"
const char* hr_info(void) { return "{}"; }
