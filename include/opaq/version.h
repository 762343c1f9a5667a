/* opaq/version.h: the version, written here and nowhere else (CMake and Python read this file), and the
 * export mark. Depends on nothing. */
#ifndef OPAQ_VERSION_H
#define OPAQ_VERSION_H

#define OPAQ_VERSION_MAJOR 0
#define OPAQ_VERSION_MINOR 1
#define OPAQ_VERSION_PATCH 0

#if defined(_WIN32)
#define OPAQ_API
#else
#define OPAQ_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* "0.1.0", of the library that is running, which may differ from the header you compiled against. */
OPAQ_API const char *opaq_version(void);

#ifdef __cplusplus
}
#endif

#endif
