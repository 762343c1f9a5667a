/* emulation.h: the interface of the emulated GPU for tests. Depends on nothing. */
#ifndef EMULATION_H
#define EMULATION_H

#ifdef __cplusplus
extern "C" {
#endif

/* `enter` is called before a kernel, a copy or another access to device memory, and `leave` afterwards. */
typedef void emulation_hooks_function(void (*enter)(void), void (*leave)(void));
__attribute__((visibility("default"))) emulation_hooks_function emulation_set_hooks;

/* With is_capturing, an allocation or a wait by this thread ends the process, as while a CUDA graph is captured. */
typedef void emulation_capture_function(int is_capturing);
__attribute__((visibility("default"))) emulation_capture_function emulation_capture;

/* The machine that the runtime's functions describe: the CUDA version of its driver, as 13000 for 13.0, 0 if there is none; and the
 * compute capabilities of its `count` GPUs, as 90 for 9.0. At first it has driver 13000 and two GPUs of 90. */
typedef void emulation_machine_function(int driver, const int *capabilities, int count);
__attribute__((visibility("default"))) emulation_machine_function emulation_set_machine;

/* Number of kernels that have run. */
typedef long emulation_kernels_function(void);
__attribute__((visibility("default"))) emulation_kernels_function emulation_kernels;

#ifdef __cplusplus
}
#endif

#endif
