/* opaq/version.h: the version, defined only here (CMake and Python read this file), and the export macro.
 * Depends on nothing. */
#ifndef OPAQ_VERSION_H
#define OPAQ_VERSION_H

#define OPAQ_VERSION_MAJOR 0
#define OPAQ_VERSION_MINOR 2
#define OPAQ_VERSION_PATCH 0

#if defined(_WIN32)
#define OPAQ_API
#else
#define OPAQ_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* "0.2.0": the version of the running library, which may differ from that of the header you compiled against. */
OPAQ_API const char *opaq_version(void);

#ifdef __cplusplus
}
#endif

#endif
