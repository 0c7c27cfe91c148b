// Makes a build of PyTorch for CPUs report CUDA devices, on which nothing happens: see fake_gpu.py.
// Until `show_fake_gpus` is called, PyTorch reports no devices, as without this library.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/FakeGuardImpl.h>

static bool are_shown = false;

using Guard = c10::impl::FakeGuardImpl<c10::DeviceType::CUDA>;

// torch finds this class by its registered name.
struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return are_shown; }
  bool isBuilt() const override { return are_shown; }
  bool isAvailable() const override { return are_shown; }
  bool isPinnedPtr(const void*) const override { return are_shown; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  std::string showConfig() const override { return "CUDA is simulated"; }
  c10::DeviceIndex deviceCount() const override {
    return are_shown ? c10::impl::kFakeGuardImplMaxDevices : 0;
  }
  c10::DeviceIndex getCurrentDevice() const override { return Guard::getDeviceIndex(); }
};

namespace at {
REGISTER_CUDA_HOOKS(CUDAHooks)
}

extern "C" void show_fake_gpus() {
  are_shown = true;
  auto cuda = static_cast<size_t>(c10::DeviceType::CUDA);
  c10::impl::device_guard_impl_registry[cuda].store(new Guard());
}
