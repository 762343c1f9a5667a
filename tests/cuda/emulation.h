/* emulation.h: what tests tell the emulated GPU. Depends on nothing. */
#ifndef EMULATION_H
#define EMULATION_H

#ifdef __cplusplus
extern "C" {
#endif

/* `enter` is called before a kernel, a copy or the like touches device memory, and `leave` afterwards. */
typedef void emulation_hooks_function(void (*enter)(void), void (*leave)(void));
__attribute__((visibility("default"))) emulation_hooks_function emulation_set_hooks;

/* Whether this thread's calls are as if a CUDA graph was captured: what allocates or waits then ends the process. */
typedef void emulation_capture_function(int is_capturing);
__attribute__((visibility("default"))) emulation_capture_function emulation_capture;

/* Kernels that have run. */
typedef long emulation_kernels_function(void);
__attribute__((visibility("default"))) emulation_kernels_function emulation_kernels;

#ifdef __cplusplus
}
#endif

#endif
