#pragma once  // the functions of bfloat are in msl_math.h
