// The tensor cores of sm_70 and sm_75 are not emulated.
#pragma once
