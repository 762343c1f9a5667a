/* base/version.c: the version of the library that is running. */
#include "opaq/version.h"

#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)

const char *opaq_version(void) {
    return TEXT(OPAQ_VERSION_MAJOR) "." TEXT(OPAQ_VERSION_MINOR) "." TEXT(OPAQ_VERSION_PATCH);
}
