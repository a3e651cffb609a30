#include "pty.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <termios.h>

#define PTMX_MAJOR 5
#define PTMX_MINOR 2

#ifndef TIOCGPTPEER
#define TIOCGPTPEER 0x5441 /* _IO('T', 0x41), Linux 4.13 */
#endif

bool pty_resize(int master_fd, uint64_t rows, uint64_t cols)
{
	struct winsize size = {
		.ws_row = (unsigned short)(rows < UINT16_MAX ? rows : UINT16_MAX),
		.ws_col = (unsigned short)(cols < UINT16_MAX ? cols : UINT16_MAX),
	};
	return ioctl(master_fd, TIOCSWINSZ, &size) == 0;
}

int pty_open_master(uint64_t rows, uint64_t cols, struct fault *fault)
{
	struct stat facts;
	int locked = 0;
	/* /dev belongs to the sandbox: whatever lies there is opened without waiting, and believed only when it is the device. */
	cleanup_fd int fd = open("/dev/ptmx", O_RDWR | O_NOCTTY | O_NONBLOCK | O_CLOEXEC);
	if (fd < 0 || fstat(fd, &facts) != 0) {
		(void)fault_set(fault, "pty", errno, "/dev/ptmx");
		return -1;
	}
	if (!S_ISCHR(facts.st_mode) || facts.st_rdev != makedev(PTMX_MAJOR, PTMX_MINOR)) {
		(void)fault_set(fault, "pty", ENODEV, "/dev/ptmx is not the terminal multiplexer");
		return -1;
	}
	if (ioctl(fd, TIOCSPTLCK, &locked) != 0 || !pty_resize(fd, rows, cols)) {
		(void)fault_set(fault, "pty", errno, "set up a terminal");
		return -1;
	}
	return steal_fd(&fd);
}

bool pty_open_slave(struct wiring *wiring, const struct identity *identity, struct fault *fault)
{
	struct termios settings;
	int fd = ioctl(wiring->master_fd, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC);
	if (fd < 0)
		return fault_set(fault, "pty", errno, "open the terminal's other side");
	(void)fchown(fd, identity->uid, identity->gid); /* only so that the command may open it again by name */
	if (tcgetattr(fd, &settings) == 0) {
		settings.c_iflag |= IUTF8;
		(void)tcsetattr(fd, TCSANOW, &settings);
	}
	wiring->stdin_fd = wiring->stdout_fd = wiring->stderr_fd = fd;
	return true;
}
