// What torch's C++ asks of the device "cuda": there is one, and its streams and events do nothing.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/autograd/engine.h>

using namespace c10;
using namespace c10::impl;

namespace {
const Device kDevice(DeviceType::CUDA, 0);
const Stream kStream(Stream::DEFAULT, kDevice);

struct Guard final : NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device getDevice() const override { return kDevice; }
  Device exchangeDevice(Device) const override { return kDevice; }
  Stream getStream(Device) const noexcept override { return kStream; }
  Stream getDefaultStream(Device) const override { return kStream; }
  Stream getNewStream(Device, int) const override { return kStream; }
  Stream exchangeStream(Stream) const noexcept override { return kStream; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  void synchronizeEvent(void*) const override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void recordDataPtrOnStream(const DataPtr&, const Stream&) const override {}
};

Guard guard;

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isAvailable() const override { return true; }
  bool isBuilt() const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void*) const override { return false; }
  int getNumGPUs() const override { return 1; }
};
static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface), "both hold no values");

struct Engine final : torch::autograd::Engine {
  // torch started no thread for a device if a backward ran before there was one
  static void start_thread(torch::autograd::Engine& engine) {
    engine.initialize_device_threads_pool();
    if ((engine.*&Engine::device_ready_queues_).empty()) (engine.*&Engine::start_device_threads)();
  }
};
}  // namespace

extern "C" void install_guard() {
  // torch made its hooks when they were first asked for; ours take their place in memory
  new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Hooks();
  device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)].store(&guard);
  Engine::start_thread(torch::autograd::Engine::get_default_engine());
}
